"""Answers and records of a real engine with either of vLLM's model runners."""

import json
import subprocess
import sys
from pathlib import Path

import model_runners

from redraft.online.records.record import read_frames
from redraft.online.records.spool import spool_files


def run_capture(runner, spool, schedules_ahead=False, more_env=None, preempts=False, **spec):
    """Answers, status and records of a real engine with this runner."""
    script = Path(__file__).parent / "run_capture.py"
    environment = model_runners.environment(runner, schedules_ahead=schedules_ahead) | (
        more_env or {}
    )
    command = [sys.executable, script, json.dumps(spec | {"spool": str(spool)})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    line = next((line for line in done.stdout.splitlines() if line.startswith("REPORT")), None)
    assert line, done.stderr[-4000:]
    report = json.loads(line.removeprefix("REPORT"))
    assert (report["batches_at_once"] > 1) is schedules_ahead
    assert (report["preemptions"] > 0) is preempts
    assert report["status"]["runner"].lower().startswith(f"{runner} model runner")
    counts = report["status"]["capture"] | {
        name: report[name] for name in ("counted_drafts", "seen", "pace")
    }
    assert not [
        name for name in counts if name.startswith(("errors", "broken")) and counts[name]
    ], counts
    assert not counts["last_error"]
    frames = [frame for path in spool_files(spool) for frame in read_frames(path.read_bytes())]
    return report["answers"], counts, [record for _, record in frames]
