# SPDX-License-Identifier: Apache-2.0
"""Predictors: what an op asks for predictions, whether its model is in this process or behind a connection.

settings      what an op is told about its model
model_client  one face before all kinds of models
signature     names and types from a description, and the checks against them; prototxt reads it
local         models in this process; runtimes and function run them
watching      what replaces one of them when its files change
remote        which servers are asked, in turn; kserve, general_servers and chained are what they speak
general_model what the original's model servers are asked, in JSON; rpc_tensors has it in protobuf
hosting       a process that is started for a model
handler       a local model as scripts of the original make one
"""

from forebay.surfaces.pipeline.predictors.clients import client_for
from forebay.surfaces.pipeline.predictors.handler import LocalServiceHandler
from forebay.surfaces.pipeline.predictors.model_client import Client
from forebay.surfaces.pipeline.predictors.settings import LocalConf, PredictorSettings

__all__ = ["Client", "LocalConf", "LocalServiceHandler", "PredictorSettings", "client_for"]
