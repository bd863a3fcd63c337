# SPDX-License-Identifier: Apache-2.0
"""A pipeline of one op that computes in pure Python, two at a time, with a short queue.

Arguments: both ports, and thread or process.
"""

import sys

from benchmarks.work.spin import spin
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp


class Spin(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (values,) = input_dicts.values()
        return {"x": str(spin(int(values["turns"])))}, False, None, ""


read = RequestOp()
server = PipelineServer("spin")
server.set_response_op(ResponseOp(input_ops=[Spin(name="spin", input_ops=[read])]))
server.prepare_server(
    yml_dict={
        "rpc_port": int(sys.argv[1]),
        "http_port": int(sys.argv[2]),
        "worker_num": 64,
        "max_queue": 128,
        "dag": {"is_thread_op": sys.argv[3] == "thread"},
        "op": {"spin": {"concurrency": 2}},
    }
)
server.run_server()
