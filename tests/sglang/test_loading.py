"""The stand-in loads only where it belongs."""

import subprocess
import sys

import pytest


def load(path):
    code = "import sgl_kernel; print(sgl_kernel.__version__)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})


def test_it_loads(stand_in):
    done = load(str(stand_in))
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_real_operators_go_first(stand_in, tmp_path):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("")
    done = load(f"{stand_in}:{tmp_path}")
    assert done.returncode != 0
    assert "the real sgl_kernel is installed" in done.stderr


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24"])
def test_another_sglang_is_refused(stand_in, tmp_path, version):
    folder = tmp_path / f"sglang-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    done = load(f"{stand_in}:{tmp_path}")
    assert done.returncode != 0
    assert f"SGLang {version} is installed" in done.stderr


def test_torchvision_loads():
    code = "import torchvision.transforms; from torchvision.io import ImageReadMode; print(torchvision.__version__)"
    from conftest import STAND_IN

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(STAND_IN)}
    )
    assert done.returncode == 0 and done.stdout.startswith("0.28"), done.stderr
