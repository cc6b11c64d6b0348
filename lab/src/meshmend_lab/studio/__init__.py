"""Studio: a local web page to play with a machine. It needs the extra `studio` (Starlette and uvicorn).

`state` is what the page asks about, `answers` what it is told, `workers` the processes that find the answers out, and
`server` how both travel. The page itself is in `page/`: plain JavaScript modules, without a build step.
"""

from meshmend_lab.studio.state import State

__all__ = ["State"]
