"""Runs the blocks of one page in their order: `python -c "$(cat run_page.py)" PAGE < blocks.json`.

Python blocks share this process, shell commands and files the working directory. YAML blocks are read last.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SHELL = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_RANK_PROMOTION"}
"""What the shell commands see: the test lets JAX refuse to broadcast ranks in the page's own Python alone."""

page, namespace, configs = sys.argv[1], {"__name__": "__main__"}, []
for block in json.load(sys.stdin):
    language, text, line, file = block["language"], block["text"], block["line"], block["file"]
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text, encoding="utf-8")
    if language == "python":
        exec(compile("\n" * (line - 1) + text, page, "exec"), namespace)
    elif language == "yaml":
        configs.append((text, line, file))
    elif language in ("sh", "console"):
        code = subprocess.run(["bash", "-euo", "pipefail", "-c", text], stdin=subprocess.DEVNULL, env=SHELL).returncode
        if code != block["code"]:
            sys.exit(f"{page}:{line}: exit code {code} instead of {block['code']} of:\n{text}")
if configs:
    from spmdkit.configs import load_config
    from spmdkit.launch.remote.hosts import read_hosts

    for text, line, file in configs:
        path = Path(file or "snippet.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            read_hosts(path) if file == "hosts.yaml" else load_config(path)
        except ValueError as error:
            sys.exit(f"{page}:{line}: {error}")
