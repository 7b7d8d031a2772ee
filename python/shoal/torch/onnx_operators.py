"""The operators of torch that models use and its exporter to ONNX has no translation of: sums of jagged rows.

    repeat_interleave(lengths, output_size)     the example of each item
    segment_reduce(rows, "max", offsets)        the greatest row of each example's items

Threads: pure functions, which the exporter calls while it builds a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return the translations, by operator."""
    from onnxscript import opset18

    op: Any = opset18

    def constant(*numbers: int) -> Any:
        return op.Constant(value_ints=list(numbers))

    def repeat_interleave(lengths: Any, output_size: Any = None) -> Any:
        # Item i is of as many examples further as have ended before it.
        ends = op.CumSum(lengths, constant(0))
        count = op.ReduceSum(lengths)
        ended = op.ConstantOfShape(count + constant(1), value=_tensor(0))
        ones = op.ConstantOfShape(op.Shape(ends), value=_tensor(1))
        ended = op.CumSum(op.ScatterElements(ended, ends, ones, reduction="add"), constant(0))
        return op.Slice(ended, constant(0), constant(-1))

    def segment_reduce(
        data: Any,
        reduce: str,
        *,
        lengths: Any = None,
        indices: Any = None,
        offsets: Any = None,
        axis: int = 0,
        unsafe: bool = False,
        initial: Any = None,
    ) -> Any:
        if reduce != "max" or axis != 0 or offsets is None or initial is not None:
            raise NotImplementedError(f"segment_reduce of {reduce} has no translation to ONNX")
        begins = op.Slice(offsets, constant(0), constant(-1))
        counts = op.Slice(offsets, constant(1), op.Shape(offsets)) - begins
        example = op.Unsqueeze(repeat_interleave(counts), constant(1))
        shape = op.Shape(data)
        width = op.Slice(shape, constant(1), constant(2))
        least = op.ConstantOfShape(op.Concat(op.Shape(begins), width, axis=0), value=_tensor(float("-inf")))
        return op.ScatterElements(least, op.Expand(example, shape), data, axis=0, reduction="max")

    return {
        torch.ops.aten.repeat_interleave.Tensor: repeat_interleave,
        torch.ops.aten.segment_reduce.default: segment_reduce,
    }


def _tensor(number: float) -> Any:
    import onnx

    kind = onnx.TensorProto.INT64 if isinstance(number, int) else onnx.TensorProto.FLOAT
    return onnx.helper.make_tensor("value", kind, [1], [number])
