"""The training loop: stages, epochs, steps.

A trainer has the position in training: the stage (`stage_index`) and the step in that stage (`step`), both counted from 0.
Several seeds can train in parallel on one GPU. Their trainers are always at the same position.

At the end of a stage, the last `end_epoch` writes the log line, validates, and saves a checkpoint. `Trainer.end_stage` then
replaces the weights by their moving average if `--train.ema` is set. `Trainer.set_stage` goes to step 0 of the next stage: it
sets the trainable parameters and creates a new optimizer and new batches. Weights and queue are kept. `Trainer.start_stage`
lets the method prepare the stage, for example by computing class means or making a new classifier. After the last stage, `fit`
returns, and `engine/train.py` evaluates the network on the test set.
"""

from collections.abc import Callable, Sequence

import torch

from longtail.distributed import all_max
from longtail.engine.cuda_graph import make_step
from longtail.engine.distributed import average_gradients
from longtail.engine.loggers import Log
from longtail.engine.meter import NonFiniteError
from longtail.engine.sharpness import perturbed
from longtail.engine.signals import StopSignals
from longtail.engine.trainer import Trainer
from longtail.errors import Interrupted
from longtail.models.side_stream import SideStream

BOOKKEEPING = 2
"""The number of the side stream that sums logged terms and stores keys; the networks use the side streams 0 and 1."""


def fit(trainers: Sequence[Trainer], logs: Sequence[Log], stop: StopSignals) -> None:
    """Train from the current step of the trainers to the end of the last stage.

    Args:
        trainers: One trainer for each seed.
        logs: Their logs.
        stop: Records the signal that requests to save and stop.
    """
    first = trainers[0]
    share_views(trainers)
    for stage_index in range(first.stage_index, len(first.method.stages)):
        for trainer in trainers:
            if trainer.stage_index != stage_index:
                trainer.set_stage(stage_index)
            if trainer.step == 0:
                trainer.start_stage()  # skipped if the run is resumed within the stage
        stop_if_requested(trainers, logs, stop)

        run_step = make_step(trainers, train_step)  # eager, compiled, or captured as a CUDA graph
        for trainer in trainers:
            trainer.start_clock()
        steps_per_epoch = first.steps_per_epoch
        for epoch in range(first.step // steps_per_epoch, first.stage.epochs):
            for step in range(first.step, (epoch + 1) * steps_per_epoch):  # a resumed run starts within an epoch
                for trainer in trainers:
                    trainer.prepare(step)  # learning rate and views
                run_step()
                for trainer in trainers:
                    trainer.count_step()
                if (step + 1) % steps_per_epoch == 0:
                    end_epoch(trainers, logs)  # log; validate and save if due, always at the end of a stage
                else:
                    for_each_trainer(trainers, logs, show_progress)
                stop_if_requested(trainers, logs, stop)
        for trainer in trainers:
            trainer.end_stage()  # deploys averaged weights, if there are any


def share_views(trainers: Sequence[Trainer]) -> None:
    """Let all trainers use the views of the first one if they are the same (`--train.view_seed`)."""
    if trainers[0].config.train.view_seed != "own":
        for trainer in trainers[1:]:
            trainer.batches.close()
            trainer.batches = trainers[0].batches


def train_step(trainer: Trainer) -> None:
    """Do the device's part of a step, which never waits for the host: loss, gradients, queue, optimizer, key encoder.

    Processes exchange gradients after the backward pass. Batch norm, the contrast set and the queue exchange samples.
    On CUDA, `side.run` starts work that runs in parallel to the rest of the step until `side.join`; elsewhere it runs at once.
    """
    method, rho = trainer.method, trainer.stage.optim.sam
    side = SideStream(trainer.device, line=BOOKKEEPING)
    batches = [*trainer.shared]  # for the second pass of --optim.sam
    for part in range(trainer.accumulate):
        with trainer.matmul_precision():
            batch = trainer.shared[part] if trainer.shared else trainer.batches.next()
            if rho and not trainer.shared:
                batch = method.prepare_batch(batch)
                batches.append(batch)
            terms = method.loss(batch)
            side.run(trainer.meter.add, terms, trainer.clock)
            # Dividing by 1 would launch two kernels.
            loss = terms["loss"] if trainer.accumulate == 1 else terms["loss"] / trainer.accumulate
            loss.backward()
        side.join()
    if rho:
        average_gradients(method)
        with perturbed(method, trainer.optimizer, rho), trainer.matmul_precision():
            for batch in batches:
                (method.loss(batch)["loss"] / trainer.accumulate).backward()
    method.after_backward(side)  # new keys enter the queue
    average_gradients(method)
    trainer.clip_gradients()
    trainer.gradients.add(method, side)  # norms for --log.gradients
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    method.after_step()  # the key encoder follows
    side.join()
    trainer.average.update()  # moving average of the weights for --train.ema


def end_epoch(trainers: Sequence[Trainer], logs: Sequence[Log]) -> None:
    """End an epoch of all trainers. They share one end time, which does not include writing the logs."""
    if trainers[0].device.type == "cuda":
        torch.cuda.synchronize()
    now = trainers[0].now()
    for_each_trainer(trainers, logs, lambda trainer, log: trainer.end_epoch(log, now))
    for trainer in trainers:
        trainer.start_clock()


def show_progress(trainer: Trainer, log: Log) -> None:
    """Update the progress display if it is due in any process."""
    if all_max(log.is_due()):
        row = trainer.log_row()
        log.show(trainer.steps_done(), row, trainer.seconds_left(row["seconds"]))


def stop_if_requested(trainers: Sequence[Trainer], logs: Sequence[Log], stop: StopSignals) -> None:
    """Save and raise Interrupted if a signal was received.

    At step 0 of a stage nothing is saved: a resumed run starts the stage again from the end of the previous one.
    """
    signum = all_max(stop.signum or 0)
    if not signum:
        return
    if trainers[0].step:
        for_each_trainer(trainers, logs, lambda trainer, _: trainer.save())
    saved = f" and saved in {', '.join(str(trainer.folder) for trainer in trainers)}" if trainers[0].step else ""
    raise Interrupted(f"stopped at step {trainers[0].steps_done()}{saved}; continue with --resume", signum)


def for_each_trainer(trainers: Sequence[Trainer], logs: Sequence[Log], work: Callable[[Trainer, Log], None]) -> None:
    """Call a function for each trainer. If one has a non-finite loss, the others are saved before its error is raised.

    Args:
        trainers: The trainers.
        logs: Their logs.
        work: Called with a trainer and its log.
    """
    failure: NonFiniteError | None = None
    for trainer, log in zip(trainers, logs, strict=True):
        try:
            work(trainer, log)
        except NonFiniteError as error:
            error.trainer = trainer
            failure = failure or error
    if failure:
        for trainer in trainers:
            if not trainer.meter.has_non_finite():
                trainer.save()
        raise failure
