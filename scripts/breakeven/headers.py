"""Safetensors files read by header: names, shapes, dtypes, and values through a memory map; numpy alone, no torch.

bfloat16, which numpy lacks, stays a uint16 array in `array` and becomes float32 in `floats`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from breakeven.artefacts import atomic, read_json
from breakeven.cli import UserError

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64,
    "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
CHUNK = 16 << 20  # elements


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file; `start` and `end` are byte offsets in `file`."""

    name: str
    dtype: str  # as in the header: BF16, F16, I64, BOOL ...
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; a UserError if it is not one or is cut off."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, 100 << 20):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(
                name, entry["dtype"], tuple(entry["shape"]), file, *(8 + length + x for x in entry["data_offsets"])
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error}); copy or export it again") from None
    for tensor in tensors.values():
        if tensor.end > size:
            raise UserError(
                f"{file}: cut off, tensor {tensor.name} ends at byte {tensor.end}, the file has {size}; copy it again"
            )
        count = int(np.prod(tensor.shape, dtype=np.int64))
        if tensor.dtype in DTYPES and count * np.dtype(DTYPES[tensor.dtype]).itemsize != tensor.end - tensor.start:
            raise UserError(f"{file}: tensor {tensor.name} has {tensor.end - tensor.start} bytes for {tensor.shape}")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: those of the index where there is one, else all of them."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: key 'weight_map' is missing; export the checkpoint again")
        for name in weight_map.values():
            if not isinstance(name, str) or not name or name != Path(name).name:
                raise UserError(f"{index}: {name!r} is no name of a file in this folder; export the checkpoint again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise UserError(f"{folder}: {file.name} is named in {index.name} but is not there; copy it as well")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"{folder}: only {pickles[0]} (a pickle); convert it to safetensors first, e.g. load it with torch.load"
                "(weights_only=True) and save it with safetensors.torch.save_file"
            )
        raise UserError(f"{folder}: no *.safetensors file")
    return files


def read(folder: Path | str) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder by name; a UserError for a missing, cut-off or pickled checkpoint."""
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise UserError(f"{folder}: tensor {name} is in {tensors[name].file.name} and in {file.name}; keep one")
            tensors[name] = tensor
    index = folder / "model.safetensors.index.json"
    missing = sorted(set(read_json(index)["weight_map"]) - set(tensors)) if index.exists() else []
    if missing:
        raise UserError(f"{index}: tensor {missing[0]} is listed but is in none of the files; export again")
    return tensors


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's values as a read-only memory map (bfloat16 as uint16, float8 as uint8)."""
    if tensor.dtype not in DTYPES:
        raise UserError(f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}, which is not known here")
    dtype = np.dtype(DTYPES[tensor.dtype])
    count = int(np.prod(tensor.shape, dtype=np.int64))
    if not count:
        return np.zeros(tensor.shape, dtype)
    return np.memmap(tensor.file, dtype, "r", offset=tensor.start, shape=(count,)).reshape(tensor.shape)


def floats(tensor: Tensor, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Some rows of a float tensor as float32 (not float8)."""
    values = np.asarray(array(tensor)[rows])
    if tensor.dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def nonfinite(tensor: Tensor) -> tuple[int, int] | None:
    """(how many NaN or infinite values, flat index of the first), or None if all are finite; reads in chunks."""
    if tensor.dtype not in FLOATS:
        return None
    values, count, first = array(tensor).reshape(-1), 0, -1
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        if tensor.dtype == "BF16":
            bad = (chunk & 0x7F80) == 0x7F80  # all exponent bits set: infinite or NaN
        elif tensor.dtype == "F8_E5M2":
            bad = (chunk & 0x7C) == 0x7C
        elif tensor.dtype == "F8_E4M3":
            bad = (chunk & 0x7F) == 0x7F  # this format has NaN but no infinity
        else:
            bad = ~np.isfinite(chunk)
        if bad.any():
            first = start + int(bad.argmax()) if first < 0 else first
            count += int(np.count_nonzero(bad))
    return (count, first) if count else None


def write(path: Path, tensors: dict[str, Tensor | np.ndarray]) -> None:
    """Write one safetensors file, streaming `Tensor` values from where they lie; arrays are int64, int32 or bool."""
    kinds = {np.dtype(np.int64): "I64", np.dtype(np.int32): "I32", np.dtype(np.bool_): "BOOL"}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.end - tensor.start if isinstance(tensor, Tensor) else tensor.nbytes
        dtype = tensor.dtype if isinstance(tensor, Tensor) else kinds[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with atomic(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.writelines(_blocks(tensor) if isinstance(tensor, Tensor) else [tensor.tobytes()])


def _blocks(tensor: Tensor, size: int = 16 << 20) -> Iterator[bytes]:
    """The tensor's raw bytes, in blocks."""
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        left = tensor.end - tensor.start
        while left:
            block = file.read(min(size, left))
            left -= len(block)
            yield block
