"""What becomes of the passes of a step that failed, in whole or in the epilogues of one program."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import PassFailed, forget_frames
from pie_core.engine.metrics import Metrics
from pie_core.engine.predict import Predictor
from pie_core.engine.step import Step
from pie_core.engine.working_set import PASS

_logger = logging.getLogger(__name__)


def refuse_epilogues(step: Step, refused: Mapping[str, DeviceError], predictor: Predictor) -> None:
    """Epilogues that did not run, by their hashes: the passes that wait for them fail when the step is read, the others have nothing
    to do with it."""
    for work in step.passes:
        error = refused.get(work.info.program.hash) if work.info is not None else None
        if error is not None:
            forget_frames(error)
            work.fault = PassFailed(f"the device could not run the epilogue of this pass: {type(error).__name__}: {error}")
            work.fault.__cause__ = error
            work.status_word = -1  # nobody wrote its results
            for use in work.uses:
                use.copy = -1
    for guess in step.guesses:
        if guess.info.program.hash in refused:
            predictor.drop(guess)


def fail_step(step: Step, error: BaseException, metrics: Metrics) -> PassFailed:
    """End the passes of a step with the cause, which is returned; their working sets and cells are not to be trusted any more."""
    if not isinstance(error, DeviceError):  # a fault of ours, which its passes alone would not bring to anybody who can mend it
        _logger.error("a step failed: %s", type(error).__name__, exc_info=error)
    cause = PassFailed(f"the device failed the step of this pass: {type(error).__name__}: {error}")
    forget_frames(error)  # they hold the step, whose passes keep the cause
    cause.__cause__ = error
    for work in step.touched:
        if work.instance.closed or work.ended:
            continue
        for part in work.parts:
            part.ws.fail(cause, PASS, work.seq)
        if work.final:
            work.pipe.flying.remove(work)
            work.pipe.retire()
        else:
            work.pipe.queue.remove(work)
            if not work.pipe.queue:
                work.instance.idle(work.pipe)
        metrics.failed_passes += 1
        work.fail(cause)
    return cause
