"""What stands for data, told from what does not."""

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.given_data import rows_in_order, rows_to_train_on


class Table:
    """Columns by name, as a DataFrame has them: `[]` takes a name, and the length is that of a column."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]


class NamedRows:
    """A sequence whose `[]` takes no number."""

    def __len__(self):
        return 1

    def __getitem__(self, name):
        raise TypeError(f"a name, not {name!r}")


@pytest.mark.parametrize("data", [Table(x=np.zeros(3)), np.zeros((0, 2)), "", range(0), np.float32(3), NamedRows()])
@pytest.mark.parametrize("take", [rows_to_train_on, lambda data: list(rows_in_order(data))])
def test_what_has_no_first_row_by_name_is_told(data, take):
    with pytest.raises(UserError, match=f"A {type(data).__name__} (alone )?is no data"):
        take(data)
