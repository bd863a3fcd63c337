# SPDX-License-Identifier: Apache-2.0
"""Two models judge a review and their mean is the answer: a project as Paddle Serving's pipelines have them.

          +-> bow --+
request --|         |--> combine --> response
          +-> cnn --+
"""

import numpy as np
from paddle_serving_app.reader import IMDBDataset
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

LENGTH = 24
"""Words of a review that the models look at; number 0 fills shorter ones up."""


class ReviewRequestOp(RequestOp):
    """Turns the words of a request into numbers."""

    def init_op(self):
        self.dataset = IMDBDataset()
        self.dataset.load_resource("out/reviews.vocab")

    def unpack_request_package(self, request):
        given = dict(zip(request.key, request.value, strict=True))
        numbers = self.dataset.get_words_only(given.get("words", ""))[:LENGTH]
        words = np.zeros((1, LENGTH), np.int64)
        words[0, : len(numbers)] = numbers
        return {"words": words}, request.logid, None, ""


class CombineOp(Op):
    """The mean of what the models say."""

    def preprocess(self, input_dicts, data_id, log_id):
        predictions = [result["prediction"] for result in input_dicts.values()]
        return {"prediction": sum(predictions) / len(predictions)}, False, None, ""


read = ReviewRequestOp()
bow = Op(name="bow", input_ops=[read])
cnn = Op(name="cnn", input_ops=[read])
combine = CombineOp(name="combine", input_ops=[bow, cnn])

server = PipelineServer("reviews")
server.set_response_op(ResponseOp(input_ops=[combine]))
server.prepare_server("config.yml")
server.run_server()
