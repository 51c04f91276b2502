import io
import re
import threading
import time

import numpy as np
import pytest

from rudra.core.records import EPOCH, LEARNER, TOTALS, UPDATE
from rudra.job.job import Job
from rudra.results.progress import Progress, duration, summary_table
from rudra.results.reader import open_results
from tests.unit.results_files import WEIGHTS, new_writer, rows, sha256, write_run

JOB = Job(name="digits", training={"epochs": 2}).resolved(learners=4, threads_per_rank=1)


def progress(mode, columns=100):
    file = io.StringIO()
    return Progress(JOB, 1000, mode=mode, columns=columns, file=file), file


def half_way(shown):
    """One of two epochs: 1,000 samples in 2 s, then 250 more in half a second."""
    shown.updates(rows(UPDATE, 2, samples=500, gradients=5, mean_staleness=[1.0, 2.0], time_s=[1.0, 2.0]))
    shown.epochs(rows(EPOCH, epoch=1, evaluated=1, samples=1000, test_error=0.125, mean_staleness=1.5, time_s=2.0))
    shown.updates(rows(UPDATE, 1, epoch=1, samples=250, gradients=5, mean_staleness=3.0, time_s=2.5))


@pytest.mark.parametrize(
    ("columns", "said", "unsaid"),
    [
        (120, ["epoch 2/2", " 62%", "test error 12.50%", "staleness 3.00", "500 samples/s", " left"], []),
        (80, ["epoch 2/2", " 62%", "test error 12.50%", "staleness 3.00", "500 samples/s"], []),
        (60, ["epoch 2/2", " 62%", "test error 12.50%"], ["samples/s"]),
        (45, ["epoch 2/2", " 62%", "test error"], ["staleness"]),
    ],
)
def test_bar_says_what_fits(columns, said, unsaid):
    shown, file = progress("bar", columns)
    half_way(shown)
    shown.close()
    head, drawn = file.getvalue().split("\n", 1)
    assert head.startswith("digits: 1-softsync, λ = 4")
    lines = drawn.split("\r")
    assert all(len(line.rstrip("\n")) <= columns for line in lines)
    assert [text for text in said if text not in lines[-1]] == []
    assert [text for text in unsaid if text in lines[-1]] == []
    assert file.getvalue().endswith("\n")


def test_bar_is_drawn_rarely_and_without_a_thread():
    threads = threading.active_count()
    shown, file = progress("bar")
    row = rows(UPDATE, 1, gradients=1, samples=1)
    start = time.monotonic()
    for row["time_s"] in range(1, 1001):
        shown.updates(row)
    elapsed = time.monotonic() - start
    assert threading.active_count() == threads
    shown.close()
    assert file.getvalue().count("\r") <= 5 + elapsed / 0.1
    assert " 50%" in file.getvalue()


def test_bar_ends_at_the_end_although_samples_overshoot():
    shown, file = progress("bar")
    shown.updates(rows(UPDATE, samples=2040, gradients=4, time_s=2.0))
    shown.close()
    shown.close()
    assert re.findall(r"\d+%\|", file.getvalue())[-1] == "100%|"


def test_lines_for_a_batch_log():
    shown, file = progress("lines")
    half_way(shown)
    shown.epochs(rows(EPOCH, epoch=2, samples=2000, test_error=np.nan, mean_staleness=3.0, time_s=75.0))
    shown.close()
    assert file.getvalue().splitlines() == [
        "digits: 1-softsync, λ = 4, μ = 16, α = 0.01 = α0 x 1 (modulation n), sgd, 2 epochs of 1,000 samples",
        "digits: epoch 1/2, test error 12.50%, staleness 1.50, 500 samples/s, 2.00 s",
        "digits: epoch 2/2, not evaluated, staleness 3.00, 27 samples/s, 1:15 min",
    ]


def test_lines_that_nobody_can_read_do_not_fail_the_run():
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    half_way(Progress(JOB, 1000, mode="lines", file=Closed()))


def test_quiet():
    shown, file = progress("quiet")
    half_way(shown)
    shown.close()
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (9.994, "9.99 s"), (12.34, "12.3 s"), (59.99, "1:00 min"), (205, "3:25 min"), (7400, "2:03:20 h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_summary_table_of_a_finished_run(tmp_path):
    with new_writer(tmp_path / "run.h5") as writer:
        described = {"epoch": [1, 2, 3], "evaluated": [1, 1, 0], "test_error": [0.1, 0.2, 0.0], "time_s": [1, 2, 3]}
        writer.append(
            "epochs",
            rows(EPOCH, 3, train_error=0.05, train_loss=0.5, mean_staleness=1.25, learning_rate=5e-4, **described),
        )
        totals = rows(TOTALS, timestamp=1500, samples=6000, pushed=3001, applied=3000, pending=1, time_s=3.0)
        learners = rows(LEARNER, 4, learner=range(4), pushed=750, compute_s=1.5, push_s=0.3, wait_s=0.6, pull_s=0.15)
        writer.finish(totals, learners, WEIGHTS, sha256(WEIGHTS))
    with open_results(tmp_path / "run.h5") as results:
        lines = summary_table(results.summary()).splitlines()
    assert lines == [
        "digits: 2-softsync, λ = 4, μ = 16, α = 0.005, MPI: finished",
        "",
        "  test error     20.00% after epoch 2 (best 10.00% after epoch 1)",
        "  not evaluated  1 of 3 epochs: evaluations took too long (training.evaluate = 'always' waits for them)",
        "  learning rate  0.005 = α0 x 0.5 (modulation n), 0.0005 at the end",
        "  epochs         3 of 10",
        "  training time  3.00 s, 2,000 samples/s",
        "  updates        1,500",
        "  gradients      3,000 applied, 1 pending",
        "  staleness      unknown",
        f"  weights        {sha256(WEIGHTS)[:16]}",
        "",
        "  epoch  test error  train error  train loss  staleness    time",
        "      1      10.00%        5.00%      0.5000       1.25  1.00 s",
        "      2      20.00%        5.00%      0.5000       1.25  2.00 s",
        "      3           –        5.00%      0.5000       1.25  3.00 s",
        "",
        "  learner  gradients  compute   push   wait  pull",
        "        0        750    50.0%  10.0%  20.0%  5.0%",
        "        1        750    50.0%  10.0%  20.0%  5.0%",
        "        2        750    50.0%  10.0%  20.0%  5.0%",
        "        3        750    50.0%  10.0%  20.0%  5.0%",
    ]


def test_summary_table_stays_short(tmp_path):
    write_run(tmp_path / "run.h5", updates=2000, epochs=140, staleness=1, learners=30)
    with open_results(tmp_path / "run.h5") as results:
        summary = results.summary()
    summary["learner_times"] = [summary["learner_times"][0] | {"pushed": n} for n in range(30)]
    lines = summary_table(summary).splitlines()
    assert len(lines) < 30
    assert "  11 of 140 epochs; rudra show --json prints all" in lines
    assert [line.split()[:2] for line in lines[-3:]] == [["least", "0"], ["mean", "14"], ["most", "29"]]
    assert "140" in [line.split()[0] for line in lines if line]


def test_summary_table_of_an_interrupted_run(tmp_path):
    write_run(tmp_path / "run.h5", updates=3, epochs=0, staleness=0, finish=False)
    with open_results(tmp_path / "run.h5") as results:
        text = summary_table(results.summary())
    assert "interrupted: somebody pressed Ctrl-C" in text
    assert "not evaluated" in text
    assert "None" not in text


def test_summary_table_of_a_running_run(tmp_path):
    write_run(tmp_path / "run.h5", updates=3, epochs=1, staleness=0)
    with open_results(tmp_path / "run.h5") as results:
        summary = results.summary()
    title = summary_table(summary | {"status": "running", "flushed_s": time.time() - 125}).splitlines()[0]
    assert re.search(r"running \(or killed; last written 2:0\d min ago\)$", title)


@pytest.mark.parametrize(("size_bytes", "line"), [(721_664, "  buckets        0.722 MB"), (0, None)])
def test_summary_table_has_the_chosen_size_of_buckets(tmp_path, size_bytes, line):
    write_run(tmp_path / "run.h5", updates=3, epochs=1, staleness=0, bucket_bytes=size_bytes)
    with open_results(tmp_path / "run.h5") as results:
        assert results.summary()["bucket_bytes"] == size_bytes
        lines = summary_table(results.summary()).splitlines()
    assert [found for found in lines if "buckets" in found] == [line] * (line is not None)


def test_metrics_that_are_shares_are_written_as_errors_are(tmp_path):
    write_run(tmp_path / "run.h5", updates=20, epochs=2, staleness=1)
    with open_results(tmp_path / "run.h5") as results:
        summary = results.summary()
    metrics = {"top5_error": [0.01, 0.005634], "precision@1": [0.5, 0.5], "perplexity": [3.0, 2.5]}
    text = summary_table({**summary, "metrics": {"test": metrics}})
    assert "top5_error 0.56%, precision@1 50.00%, perplexity 2.5" in text
    assert "0.005634" not in text
