# SPDX-License-Identifier: Apache-2.0
"""A pipeline of one op that hands on what it is given: what is left is the server.

Arguments: the ports of gRPC and of HTTP, thread or process, and `profile` if calls are to be profiled.
"""

import sys

from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp


class Echo(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (values,) = input_dicts.values()
        return values, False, None, ""


read = RequestOp()
server = PipelineServer("echo")
server.set_response_op(ResponseOp(input_ops=[Echo(name="echo", input_ops=[read])]))
server.prepare_server(
    yml_dict={
        "rpc_port": int(sys.argv[1]),
        "http_port": int(sys.argv[2]),
        "worker_num": 64,
        "dag": {"is_thread_op": sys.argv[3] == "thread", "use_profile": "profile" in sys.argv[4:]},
    }
)
server.run_server()
