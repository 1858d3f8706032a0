"""Models of other libraries: Flax Linen, Flax NNX, Equinox and Keras modules become a `Model`.

Input: the library's own module and a loss of its outputs. Output: a `Model`, which trains under every strategy that a
single function trains under. Read first: `library_model` (the call), then one library, such as `linen`. `libraries`
finds a module's library, `adapted` has the parts that all adapters share, `row_loss` turns outputs into sums.

A library is imported only if a module of it is given.
"""

from .library_model import adapt as adapt
