"""The limits of a server's process."""

import subprocess
import sys

import pytest
from checkout import ROOT


@pytest.mark.parametrize(("soft", "hard", "after"), [(128, 700, 700), (600, 700, 700), (300, 300, 300)])
def test_a_fleet_may_open_as_many_files_as_the_system_allows_it(soft, hard, after):
    code = (
        "import resource, subprocess, sys\n"
        "from dataplane.http.server import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "allow_open_files()\n"
        "subprocess.run(['sh', '-c', 'ulimit -n'], check=True)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(said.stdout) == after
