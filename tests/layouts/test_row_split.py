"""Rows of a batch and the parts that they are cut into."""

from spmdkit.layouts.row_split import RowSplit


def test_which_numbers_of_rows_fit():
    split = RowSplit({"data": 2, "accumulate": 3})
    assert split.total == 6
    assert [rows for rows in range(-6, 20) if split.fits(rows)] == [6, 12, 18]
    assert (split.nearest(16), split.nearest(1)) == (18, 6)
    assert (str(split), str(RowSplit({}))) == ("data 2 x accumulate 3", "1 device")
