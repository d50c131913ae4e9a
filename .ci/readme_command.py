"""Print one of the README's commands: the one line of the fenced block after its marker."""

import re
import sys
from pathlib import Path

readme = (Path(__file__).parent.parent / "README.md").read_text()
match = re.search(rf"<!-- command: {re.escape(sys.argv[1])} -->\s*```\w*\n(.+)\n```", readme)
if match is None:
    sys.exit(f"README.md has no command marked {sys.argv[1]!r}")
print(match[1])
