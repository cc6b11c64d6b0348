import subprocess
import sys


def test_the_core_and_its_command_line_import_no_extra() -> None:
    code = (
        "import sys, meshmend, meshmend.cli, meshmend.numpy, meshmend.halves; "
        "print(sorted({'jax', 'jaxlib', 'optax', 'flax', 'torch', 'matplotlib', 'simgrid'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"
