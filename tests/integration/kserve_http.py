# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""What kserve's client does with a server of `tests/models/tensors.py`; run in an environment of its own."""

import asyncio
import sys

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def main(url):
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=1, verify=False))
    assert await client.is_server_live(url)  # O123
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "doubled")
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for binary in (True, False):
        given = InferInput("input", [2, 3], "FP32")
        given.set_data_from_numpy(rows, binary_data=binary)
        found = await client.infer(url, InferRequest("doubled", [given], request_id="7"), model_name="doubled")
        np.testing.assert_array_equal(found.outputs[0].as_numpy(), rows * 2)
        assert found.id == "7"
    wrong = InferInput("input", [1, 2], "FP32")
    wrong.set_data_from_numpy(rows[:1, :2], binary_data=False)
    text = ""
    try:
        await client.infer(url, InferRequest("doubled", [wrong]), model_name="doubled")
    except httpx.HTTPStatusError as error:
        text = str(error)
    assert "got [1, 2]" in text, text  # O129, T19: it looks at the Content-Type before
    await client.close()
    first = InferenceRESTClient(RESTConfig(protocol="v1", retries=1, verify=False))
    found = await first.infer(url, {"instances": [[1, 2, 3]]}, model_name="doubled")
    assert found == {"predictions": [[2.0, 4.0, 6.0]]}
    await first.close()


asyncio.run(main(sys.argv[1]))
print("served")
