# SPDX-License-Identifier: Apache-2.0
"""A pipeline of four ops, A -> (B, C) -> D, that do what a request asks for: answer, raise or take their time.

Arguments: the ports of gRPC and of HTTP, thread or process, and `guarded` to serve only as the main program.
"""

import sys
import time

from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp


class Tag(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        found = [input_dicts[name]["q"] for name in sorted(input_dicts)]
        wish, _, where = found[0].partition(" in ")
        if where.startswith(self.name):
            if wish == "raise":
                raise ValueError(wish)
            time.sleep(0.005)
        return {"q": "+".join(found) + self.name}, False, None, ""


read = RequestOp()
a = Tag(name="A", input_ops=[read])
b = Tag(name="B", input_ops=[a])
c = Tag(name="C", input_ops=[a])
server = PipelineServer("diamond")
server.set_response_op(ResponseOp(input_ops=[Tag(name="D", input_ops=[b, c])]))
server.prepare_server(
    yml_dict={
        "rpc_port": int(sys.argv[1]),
        "http_port": int(sys.argv[2]),
        "worker_num": 64,
        "dag": {"is_thread_op": sys.argv[3] == "thread", "use_profile": "profile" in sys.argv[4:]},
    }
)
if __name__ == "__main__" or "guarded" not in sys.argv[4:]:
    server.run_server()
