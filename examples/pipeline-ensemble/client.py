# SPDX-License-Identifier: Apache-2.0
"""Asks the pipeline for its opinion on reviews, all at once: `python client.py [REVIEW ...]`."""

import os
import sys

from forebay.surfaces.pipeline import PipelineClient  # or paddle_serving_client.pipeline, where that is installed

REVIEWS = ["a warm and funny film", "i am very sad", "not bad at all", "the plot is not interesting"]


def main() -> int:
    reviews = sys.argv[1:] or REVIEWS
    client = PipelineClient()
    client.connect([os.environ.get("PIPELINE", "127.0.0.1:18080")])
    futures = [client.predict(feed_dict={"words": review}, fetch=["prediction"], asyn=True) for review in reviews]
    for review, future in zip(reviews, futures, strict=True):
        answer = future.result()
        if answer.err_no != 0:
            print(f"{review}: error {answer.err_no}: {answer.err_msg}")
            return 1
        bad, good = answer["prediction"][0]
        print(f"{'good' if good > bad else 'bad':<5} {good:.2f}  {review}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
