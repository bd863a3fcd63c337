# SPDX-License-Identifier: Apache-2.0
"""Predictors: what an op asks for predictions, whether its model is in this process or behind a connection.

Model files are run by `forebay.runtimes`, servers asked by `forebay.remote_servers`; here is what only a pipeline
wants.

model_settings   what an op is told about its model
model_client     one face before all kinds of models, where errors get a pipeline's numbers
descriptions     names and types beside a model's files
local_models     models in this process; function is a callable as a model
client_watching  clients whose model is replaced when its files change
general_servers  the original's model servers; general_calls is what they are asked in JSON, rpc_tensors in protobuf
chained          another pipeline as a model
model_processes  processes that are started for a model; prediction_runner is what they do
service_handler  a local model as scripts of the original make one; general_face is the port that it has then
"""

from forebay.surfaces.pipeline.predictors.clients import client_for
from forebay.surfaces.pipeline.predictors.model_client import Predictor
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf, PredictorSettings
from forebay.surfaces.pipeline.predictors.service_handler import LocalServiceHandler

__all__ = ["LocalConf", "LocalServiceHandler", "Predictor", "PredictorSettings", "client_for"]
