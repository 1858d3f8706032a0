import pytest
from spmdkit.mesh.errors import UserError

from spmdkit.testing.faults import Fault, as_text, read_faults


def test_faults_go_through_the_environment():
    faults = (
        Fault(kind="kill", rank=1, step=7),
        Fault(kind="signal", phase="data", signals=("SIGTERM", "SIGKILL"), seconds=0.5, rank=None),
        Fault(kind="raise", phase="read", error="EIO", times=3),
    )
    assert read_faults(as_text(faults)) == faults
    assert as_text(faults[:1]) == '[{"kind": "kill", "rank": 1, "step": 7}]'
    assert read_faults("") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill", "is no list of faults such as"),
        ("[7]", "is no list of faults such as"),
        ('[{"kind": "kill", "stepp": 3}]', "stepp"),
        ('[{"kind": "explode"}]', "kind 'explode' is not known; give one of kill, abort"),
        ('[{"kind": "kill", "phase": "lunch"}]', "phase 'lunch' is not known; give one of start"),
        ('[{"kind": "flip", "phase": "save"}]', "flip is injected in phase step only"),
        ('[{"kind": "damage", "how": "fire"}]', "checkpoints are damaged by flip"),
        ('[{"kind": "signal", "signals": ["SIGNONE"]}]', "no such signals"),
    ],
)
def test_what_is_no_fault_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        read_faults(text)


def test_a_fault_in_words():
    assert str(Fault(kind="kill", rank=1, step=7, phase="save")) == "kill on rank 1, save of step 7"
    assert str(Fault(kind="hang", rank=None)) == "hang on every rank, step"
