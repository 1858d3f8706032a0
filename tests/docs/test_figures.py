"""docs/figures.py: what a page shows is what its commands print, and one command renews it."""

import contextlib
import re

import figures
import picture
import pytest
from figures import PAGES, renew, renew_page, run_command, write_files
from spmdkit.launch.cli import main
from support.pages import name

PAGE = """\
# A page

```python
# folder/mine.py
print("mine")
```

Between <!-- figure --> in a sentence is none.

<!-- figure -->
```console
$ say two
one
$ cat kept.csv
a,b
$ quiet
```

<!-- figure timed: say step -->
```text
...
step  20/200  loss 9.9  1.0k tokens/s
...
end after 5 ms
```

<!-- figure: say table -->
| a | b |
|---|---|
| 1 | 9 |

<!-- figure slow: never -->
```text
as it was
```
"""
PRINTED = {
    "say two": "1\n2\n\n",
    "say step": "begin\nstep  10/200  loss 3  9.0k tokens/s\nstep  20/200  loss 2.5  11 tokens/s\n-\nend after 2.5 s\n",
    "say table": "JAX 1\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n",
}


def test_regenerates_page():
    seen = {}

    def run(line, folder):
        seen.update({file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*.*")})
        return PRINTED[line]

    new, problems, made = renew_page(PAGE, run, slow=False)
    expected = PAGE.replace("two\none\n", "two\n1\n2\n").replace("| 1 | 9 |\n", "| 1 | 2 |\n| 3 | 4 |\n")
    expected = expected.replace("loss 9.9  1.0k tokens", "loss 2.5  11 tokens").replace("5 ms", "2.5 s")
    assert new == expected
    assert problems == ["slow, renewed with --slow: never"]
    assert made == 3
    assert seen == {"folder/mine.py": '# folder/mine.py\nprint("mine")\n', "kept.csv": "a,b\n"}
    assert renew_page(new, run, slow=False)[0] == new


def test_regenerates_promised_losses():
    text = "# a\n# expect: evaluation loss 9.99 nats per byte (a bigram model: 9.99), a minute\nrun: {seed: 9}\n"
    printed = "Evaluation loss 1.4272 after 300 steps.\nThat is below the 2.3943 of a bigram model fitted on it.\n"
    expected = text.replace("9.99 nats", "1.43 nats").replace("9.99)", "2.39)")
    assert figures.expected_losses(text, printed) == expected
    assert figures.expected_losses(text, "") == text


HELD = [(page, figure) for page in PAGES for figure in figures.figures(page.read_text(encoding="utf-8"))]


def shown_as(value):
    return name(value) if not isinstance(value, figures.Figure) else (value.command or value.body.splitlines()[0])


@pytest.mark.parametrize(
    ("page", "figure"),
    [
        pytest.param(*held, marks=pytest.mark.slow if {"explain", "--dry-run"} & {*shown_as(held[1]).split()} else ())
        for held in HELD
        if not held[1].kinds
    ],
    ids=shown_as,
)
def test_pages_show_current_output(page, figure, tmp_path, monkeypatch, capsys):
    """Those whose numbers are the same on every machine; the commands run in this process."""

    def run(line, folder):
        with contextlib.suppress(SystemExit):
            main(figures.words_typed(line)[1:])
        printed = capsys.readouterr()
        return printed.out + printed.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", figures.COLUMNS)
    write_files(page.read_text(encoding="utf-8"), tmp_path)
    assert renew(figure, run, tmp_path) == (figure.body, []), "`make figures` renews it"


@pytest.mark.long
@pytest.mark.slow
def test_readme_losses_are_reproduced(tmp_path):
    """Times differ; what is printed, and every loss to 1%, does not."""
    text = PAGES[0].read_text(encoding="utf-8")
    write_files(text, tmp_path)
    figure = next(figure for figure in figures.figures(text) if "timed" in figure.kinds)
    new, lost = renew(figure, run_command, tmp_path)
    assert lost == []
    assert losses(new) == pytest.approx(losses(figure.body), rel=0.01)


def losses(text):
    lines = "\n".join(line for line in text.splitlines() if line.startswith("step "))
    return [float(loss) for loss in re.findall(r"(?:loss|eval) (\S+)", lines)]


@pytest.mark.parametrize("file", figures.pictures())
def test_pictures_are_current(file):
    drawn = figures.pictures()[file]()
    assert (figures.PICTURES / file).read_text(encoding="utf-8") == drawn, "`make figures` renews it"


def test_each_row_of_the_picture_is_a_copy_and_each_column_a_shard():
    table = picture.layouts_drawn()
    assert [table.row(path).layout.axes for path in ("up", "down")] == [("fsdp", None)] * 2
    assert "rows 224 to 255" in picture.draw()
