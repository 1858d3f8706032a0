import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.joining.hostlists import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("n[001-003]", ["n001", "n002", "n003"]),
        ("n[08-11],login", ["n08", "n09", "n10", "n11", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster", ["n1.cluster", "n2.cluster"]),
    ],
)
def test_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "a,,b", "n[1-x]", "n[2-1]", "n[[1]]", "n[1-99999999]", "n[-3]"])
def test_no_hosts(text):
    with pytest.raises(UserError, match="SLURM_X='"):
        expand_hosts(text, "SLURM_X")


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2])])
def test_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "two", "2(x)", "2x3", "-1"])
def test_no_counts(text):
    with pytest.raises(UserError, match="must hold counts such as"):
        expand_counts(text)
