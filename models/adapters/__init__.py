"""Models of other libraries, taken as they are: Flax Linen, Flax NNX, Equinox and Keras modules become a `Model`.

In: the library's own module and a loss of its outputs. Out: a `Model`, which trains under every strategy that one
function trains under. Read first: `of_library` (the call), then one library, such as `linen`; `makers` tells whose a
module is, `adapted` is what all of them give, `row_loss` turns outputs into sums, `row_dropout` draws masks that do not
depend on the mesh.

A library is imported where a module of it is met, never before.

`adapted` shares the tests of `of_library`; `equinox` shares the tests of `of_library`; `keras` shares the tests of
`of_library`; `linen` shares the tests of `of_library`; `nnx` shares the tests of `of_library`.
"""

from .of_library import adapt as adapt
