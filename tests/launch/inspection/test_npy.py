import io

import ml_dtypes
import numpy as np
import pytest
from spmdkit.launch.inspection.npy import npy_dtype, npy_header


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (10**6, 7)])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64"])
def test_numpy_reads_the_header(shape, dtype):
    file = io.BytesIO(npy_header(shape, np.dtype(dtype)))
    assert np.lib.format.read_magic(file) == (1, 0)
    assert np.lib.format.read_array_header_1_0(file) == (shape, False, np.dtype(dtype))
    assert file.read() == b""


def test_what_numpy_cannot_name_becomes_float32():
    assert npy_dtype(np.dtype(ml_dtypes.bfloat16)) == npy_dtype(np.dtype(ml_dtypes.float8_e4m3fn)) == np.float32
    assert npy_dtype(np.dtype(np.float16)) == np.float16
