"""What each of the engine's counters and gauges means, for GET /metrics."""

from __future__ import annotations

from typing import Final

HELP: Final[dict[str, str]] = {
    "adopted_total": "Passes run ahead that the inferlet then asked for",
    "arena_words_used": "Words of 32 bits that channels and other values hold on the device",
    "busy_s_total": "Seconds in which the device had a step",
    "decode_tokens_total": "Rows computed by short passes, such as those of one token",
    "dropped_total": "Passes run ahead that the inferlet did not ask for",
    "engine_losses_total": "Engines that were lost",
    "engine_rebuilds_failed_total": "Rebuilds of a lost engine that failed",
    "engine_rebuilds_total": "Lost engines that were rebuilt",
    "evicted_total": "Pages of cached prefixes given up for others",
    "failed_passes_total": "Passes that failed",
    "failed_steps_total": "Steps that failed, with all their passes",
    "host_waits_total": "Passes scheduled only after the one before of their pipeline was read",
    "in_flight": "Steps given to the device and not read",
    "instances": "Inferlets that run now",
    "lingers_total": "Waits for a pipeline's next pass that ended without one",
    "pages_cached": "Free pages of the KV cache that are kept for what they hold",
    "pages_free": "Pages of the KV cache that nobody holds, those that are kept included",
    "pages_shared": "Pages of the KV cache that several working sets hold",
    "pages_used": "Pages of the KV cache that are held",
    "passes_total": "Forward passes that ended",
    "paused_total": "Working sets whose pages were given back for want of room",
    "predicted_total": "Passes run before they were submitted",
    "prefill_tokens_total": "Rows computed by long passes, such as prompts",
    "queue_wait_max": "Longest wait of a pass from its acceptance to its first step, in seconds",
    "queue_wait_sum_total": "Seconds that passes waited from their acceptance to their first step",
    "read_back_bytes_total": "Bytes of results read from the device",
    "read_backs_total": "Results read from the device, one a step",
    "reused_tokens_total": "Tokens not computed because shared pages held them",
    "revived_total": "Working sets computed again after their pages had been given back",
    "skipped_passes_total": "Passes that did not run because their loop had stopped",
    "state_slots_free": "Free slots of recurrent state",
    "state_slots_used": "Slots of recurrent state that are held",
    "steps_total": "Steps of the device that were read",
}


def help_of(name: str) -> str:
    """The words for a counter (`*_total`) or gauge; a name that is not in the table stands for itself."""
    return HELP.get(name, name.replace("_", " "))
