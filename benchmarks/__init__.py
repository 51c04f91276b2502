"""Benchmarks that only a checkout has. Each is a module with `run(*, quick)`, which returns a `Report`.

`rudra bench NAME` runs them. `rudra.bench` has the benchmarks that users run on their own machines. Jobs, sweeps and
reports, not benchmarks, reproduce the results of papers.
"""

BENCHMARKS = {  # name -> comparison and goal
    "tta": (
        "time to accuracy of two learners, by protocol, against torch DDP; needs Fashion-MNIST or CIFAR-10",
        "the best of ours >= 1.5 times as fast as the best DDP",
    ),
    "tune": (
        "rudra tune against training with all settings, on simulated clusters; needs Fashion-MNIST and CIFAR-10",
        "guided <= 1.15 times as late as the oracle, in all cases but one",
    ),
    "strategies": (
        "strategies of rudra tune on the recorded curves of the oracle of tune; trains nothing",
        "the best guess of guided is within 5 % of the best after <= 4 reference runs",
    ),
    "predictions": (
        "answers of rudra tune in virtual time against runs of them on two ranks; needs Fashion-MNIST",
        "in 8 of 10: an epoch within 10 %; time to target within 1.3 times and the expected range",
    ),
    "averaging": (
        "averages of replicas with every mini-batch (sma), of 18 MB and 289 MB, against what memory allows",
        ">= 0.9 of the bound",
    ),
    "requests": (
        "pushes/s of 1.7 MB that a server takes from 1, 2, 4 senders, and how evenly; several servers against one",
        ">= 2.0 times those by messages; each sender within 5 % of the mean; two servers (topology sharded) >= 0.9",
    ),
    "reduction": (
        "hardsync by allreduce on two hosts behind 1 Gbit/s: gradients added on each node first, against all to all",
        'steps/s of reduction = "nodes" >= those of "ordered"',
    ),
    "link": (
        "gradients in buckets: allreduce against torch DDP on gloo, and pushes to a server; two hosts behind a link",
        ">= 1.0 to 1.3 times its steps/s",
    ),
    "islands": (
        "DiLoCo, an average every 50 mini-batches, against hardsync by allreduce; two hosts behind 100 Mbit/s",
        ">= 5 times its samples/s, in whichever order hardsync adds",
    ),
    "placed": (
        "layers on a stage server (RALP, merged) against whole models: behind 100 Mbit/s, 1 Gbit/s, and on one host",
        ">= 5 times the samples/s of base behind 100 Mbit/s, 0.8 of the predicted speed; >= 0.9 on one host",
    ),
    "overlap_10g": (
        "what `overlap` measures, for one learner behind 10 Gbit/s",
        "overlap of adv* >= 95 %; 0.72 of compute only",
    ),
    "update": ("the server's update of a 289 MB model, against memory bandwidth", ">= 0.9 of the bound"),
    "sparse": (
        "sparse inputs (44 of 8,315 features) against dense ones: the first layer, and the step of 8,315-512x4-2",
        ">= 20 times as fast, and >= 5 times",
    ),
    "memory": ("peak memory of learner and server, in model sizes", "learner <= 3.5; server <= 4, +1 with a snapshot"),
    "input": (
        "how long a learner waits for its mini-batches, with and without an input thread, and the steps/s of both",
        "< 2 % of a step of lenet and resnet32, in the way that a run draws them",
    ),
    "bank": (
        "gradients of the learners of a bank: one after another, at the same time, and fused (cluster.bank)",
        "no goal",
    ),
    "bank_records": (
        "time of the host for the records of a bank whose learners compute nothing: updates and local steps",
        "per round: <= 60 µs + 4 µs a learner in bursts of 1, <= 5 µs in bursts of 64; >= 200,000 rows/s",
    ),
    "growth": (
        "banks that grow while they train (cluster.learners_per_device = 'auto'), against a sweep of fixed sizes",
        "the last m has >= 0.8 of the sweep's best samples/s",
    ),
    "compile": ("gradients by torch.compile (training.compile), against the same without it", ">= 1.3 for lenet"),
    "recording": ("what it costs to record a run so that it can be replayed", "<= 1 % of the run"),
    "checkpoint": ("slow-down of the training while a checkpoint is written", "<= 2 % at one a minute"),
    "simulator": (
        "a simulation against its bare gradients; timing-only runs of up to 4,096 learners",
        "<= 10 % over; >= 200,000 messages/s; 4.1 M pushes in < 120 s",
    ),
    "whatif": (
        "predictions from the rows of one run (costs from a run), against runs with six other settings",
        "each within 15 %, their median within 10 %",
    ),
    "straggler": (
        "explanation of a run with a learner three times as slow, and its predicted gain of shares against a run's",
        "the learner is named; the predicted gain is within 20 % of the measured one",
    ),
    "gpu": (
        "checks of a GPU, and one learner on it against plain torch loops and CUDA graphs; or on the CPU",
        "no row fails; images/s >= 0.9 (lenet) and 0.95 (resnet32) of a CUDA graph, and twice eager torch at μ = 16",
    ),
    "hogbatch": (
        "workers that share weights in a window: two against one and against torch's Hogwild",
        ">= 1.7 times the samples/s of one; >= 1.5 times torch's at μ = 1 and 8; <= 3 % waiting",
    ),
}
