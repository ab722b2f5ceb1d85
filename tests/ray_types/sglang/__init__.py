"""SGLang's request types without SGLang: ray.serve.llm imports one module of it, which needs no GPU library.

`make ray` installs the package without its dependencies. This folder stands before it on the path, so that the
package's own `__init__`, which imports them, does not run.
"""

import sys
from pathlib import Path

__path__ = [str(Path(entry) / "sglang") for entry in sys.path if (Path(entry) / "sglang" / "srt").is_dir()]
