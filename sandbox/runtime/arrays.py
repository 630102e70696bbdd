"""numpy arrays and pandas data frames as encoded values (docs/values.md).

Called by `values`, for values of libraries that are loaded, and for encoded ones that arrived.
A receiver without the library gets a `Record` with the same fields.
"""

from __future__ import annotations

import base64
import importlib.util
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = r"[<>|][biufcU][0-9]{1,9}"  # a dtype: byte order, kind and size


def encode_array(array: Any, refuse: Callable[[str], Exception]) -> dict[str, Any]:
    """Encodes an array of plain numbers, bools or text."""
    if not re.fullmatch(_PLAIN, array.dtype.str):
        raise refuse(f"an array of {array.dtype}; plain numbers, bools and text can cross")
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def decode_array(body: Any) -> Any:
    """Decodes an array.

    Raises:
        ValueError, TypeError, KeyError: it is malformed.
    """
    if not isinstance(body, dict) or set(body) != {"dtype", "shape", "data"}:
        raise ValueError("dtype, shape and data are needed")
    dtype, shape = body["dtype"], body["shape"]
    if not isinstance(dtype, str) or not re.fullmatch(_PLAIN, dtype):
        raise ValueError("this dtype is not allowed")
    if not isinstance(shape, list) or len(shape) > 32:
        raise ValueError("the shape must be a short list")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("the shape must be whole numbers")
    data = base64.b64decode(body["data"].encode("ascii"), validate=True)
    numpy = _library("numpy")
    if numpy is None:
        return _record("ndarray", {"dtype": dtype, "shape": shape, "data": data})
    flat = numpy.frombuffer(data, dtype=numpy.dtype(dtype))
    return flat.reshape(shape).copy()


def encode_frame(frame: Any, encode: Callable[[Any], Any]) -> dict[str, Any]:
    """Encodes a data frame, as Arrow where pyarrow is there, else column by column."""
    arrow = _library("pyarrow")
    if arrow is not None:
        sink = arrow.BufferOutputStream()
        table = arrow.Table.from_pandas(frame)
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data = base64.b64encode(sink.getvalue().to_pybytes()).decode("ascii")
        return {"format": "arrow", "data": data}
    columns = [[encode(name), encode(series.tolist())] for name, series in frame.items()]
    return {"format": "columns", "columns": columns}


def decode_frame(body: Any, decode: Callable[[Any], Any]) -> Any:
    """Decodes a data frame.

    Raises:
        ValueError, TypeError, KeyError: it is malformed.
    """
    if not isinstance(body, dict):
        raise TypeError("an object is needed")
    pandas = _library("pandas")
    if set(body) == {"format", "data"} and body["format"] == "arrow":
        data = base64.b64decode(body["data"].encode("ascii"), validate=True)
        arrow = _library("pyarrow")
        if arrow is None or pandas is None:
            return _record("dataframe", {"format": "arrow", "data": data})
        with arrow.ipc.open_stream(data) as reader:
            return reader.read_all().to_pandas()
    if set(body) != {"format", "columns"} or body["format"] != "columns":
        raise ValueError("format and data or columns are needed")
    columns = [(decode(name), decode(items)) for name, items in body["columns"]]
    if pandas is None:
        return _record("dataframe", {"format": "columns", "columns": columns})
    return pandas.DataFrame(dict(columns), columns=[name for name, _ in columns])


def encode_record(record: Any, encode: Callable[[Any], Any]) -> dict[str, Any]:
    """Encodes what stands for an array or frame where the library is missing, as it came."""
    fields = dict(record._asdict())
    if "columns" in fields:
        fields["columns"] = [[encode(name), encode(items)] for name, items in fields["columns"]]
    else:
        fields["data"] = base64.b64encode(fields["data"]).decode("ascii")
    return fields


def _library(name: str) -> Any:
    """Returns one of three named libraries, or None where it is not installed."""
    if name in sys.modules:
        return sys.modules[name]
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def _record(class_name: str, fields: dict[str, Any]) -> Any:
    from .records import Record

    return Record(class_name, fields, class_name)
