"""A model of Triton's Python backend that answers from an export of shoal.

    tritonserver --model-repository=deploy/triton

Python's environment of the backend needs shoal. Inputs and output are those of `shoal serve` over the Open Inference
Protocol, and so are the probabilities and the errors; config.pbtxt names the export. Inputs may be left out: see
docs/serving.md.
"""

import json
import struct

import numpy as np
import triton_python_backend_utils as pb_utils

from shoal.serve import Limits, ServedModel
from shoal.serve.app import Handler, Request
from shoal.serve.limits import Account
from shoal.serve.protocols import HEADER_LENGTH, model_metadata

KINDS = {"u": "UINT", "i": "INT", "f": "FP", "b": "BOOL"}


def parameter(config, name, default=""):
    """Return a parameter of config.pbtxt."""
    return config.get("parameters", {}).get(name, {}).get("string_value", default)


def datatype_and_bytes(array):
    """Return what the protocol calls the type of an array, and its elements as raw data."""
    if array.dtype.kind in "OSU":
        texts = (text.encode() if isinstance(text, str) else bytes(text) for text in array.reshape(-1))
        return "BYTES", b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))
    kind = KINDS[array.dtype.kind]
    return kind if kind == "BOOL" else f"{kind}{8 * array.itemsize}", np.ascontiguousarray(array).tobytes()


class TritonPythonModel:
    """What Triton calls: one object for each instance of the model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        """Add the model's inputs, each of them optional, and its output."""
        with ServedModel(parameter(auto_complete_model_config.as_dict(), "export")) as served:
            described = model_metadata("model", [served.now.version], served.now)
        offsets = {"name": "offsets", "datatype": "INT64", "shape": [-1]}
        keys = [] if all(one["name"] != "keys" for one in described["inputs"]) else [offsets]
        for one in [*described["inputs"], *keys]:
            dims = [-1] if keys else one["shape"]  # with offsets the keys of all instances are one list
            auto_complete_model_config.add_input(
                {"name": one["name"], "data_type": triton_type(one), "dims": dims, "optional": True}
            )
        (output,) = described["outputs"]
        auto_complete_model_config.add_output(
            {"name": output["name"], "data_type": triton_type(output), "dims": output["shape"]}
        )
        return auto_complete_model_config

    def initialize(self, args):
        """Open the export."""
        config = json.loads(args["model_config"])
        self.served = ServedModel(parameter(config, "export"))
        if watch := parameter(config, "watch"):
            self.served.watch(float(watch))
        self.handler = Handler(self.served, limits=Limits())

    def execute(self, requests):
        """Answer requests, each by one version."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Answer one request."""
        inputs, parts = [], []
        for tensor in request.inputs():
            array = tensor.as_numpy()
            datatype, raw = datatype_and_bytes(array)
            size = {"binary_data_size": len(raw)}
            inputs.append({"name": tensor.name(), "shape": array.shape, "datatype": datatype, "parameters": size})
            parts.append(raw)
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join([head, *parts])
        with Account(self.handler.budget) as account:
            headers = {HEADER_LENGTH: str(len(head))}
            response = self.handler.answer(Request("POST", "/v2/models/default/infer", headers, body, account))
        if response.status != 200:
            error = pb_utils.TritonError(json.loads(response.body)["error"])
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        size = int(response.headers[HEADER_LENGTH])
        (output,) = json.loads(response.body[:size])["outputs"]
        found = np.frombuffer(response.body[size:], np.float64).reshape(output["shape"])
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(output["name"], found)])

    def finalize(self):
        """Close the export."""
        self.served.close()


def triton_type(tensor):
    """Return what config.pbtxt calls the type of a tensor."""
    datatype = tensor["datatype"]
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
