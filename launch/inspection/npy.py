"""NumPy's own format: what stands before the numbers of a .npy file, and which dtypes it can name."""

import io

import numpy as np


def npy_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that a .npy file gets: float32 for those that NumPy would read back as bytes without a meaning."""
    return dtype if dtype.kind in "biufc" else np.dtype(np.float32)


def npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """What a .npy file begins with; the numbers follow in C order.

    Args:
        shape: Of the array.
        dtype: Of the array, from `npy_dtype`.
    """
    begin = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(begin, described)
    return begin.getvalue()
