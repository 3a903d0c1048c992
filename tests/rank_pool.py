"""Two processes that run one job after another, for tests with several ranks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("rank_worker.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Ranks:
    """Two workers (see rank_worker.py) under torchrun, which starts them again if one of them ends."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, 0
        with open(folder / "log", "w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*TORCHRUN, "--max-restarts", "2", str(WORKER), str(folder)]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def start(self, call, *arguments, restart=False):
        job = {"call": call, "arguments": arguments, "restart": restart}
        (self.folder / "job").write_text(json.dumps(job))
        os.replace(self.folder / "job", self.folder / f"{self.jobs}.job")
        self.jobs += 1

    def answers(self):
        """Both ranks' {"code", "out", "err"} about the last job."""
        paths = [self.folder / f"{self.jobs - 1}.{rank}.json" for rank in range(2)]
        self.wait(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def wait(self, done):
        deadline = time.monotonic() + 300
        while not done():
            assert self.process.poll() is None and time.monotonic() < deadline, self.story()
            time.sleep(0.01)

    def __call__(self, call, *arguments):
        self.start(call, *arguments)
        return self.answers()

    def said(self, name):
        return (self.folder / name).read_text()

    def story(self):
        """What torchrun and the ranks said, for a failure's report."""
        paths = [self.folder / "log", *sorted(self.folder.glob(f"{self.jobs - 1}.*.err"))]
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in paths)

    def errors(self, restart):
        """What each rank said about the last job after that many restarts."""
        return [self.said(f"{self.jobs - 1}.{rank}.{restart}.err") for rank in range(2)]

    def close(self):
        """The workers see the file and end; what torchrun would say about that nobody reads."""
        (self.folder / "end").touch()
        self.process.kill()
        self.process.wait()
