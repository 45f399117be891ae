"""One step while it is being filled: takes passes in, gives out a StepBatch, and remembers what to settle."""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.device.protocol import NONE, PAGE_TOKENS
from pie_core.engine.forward import Part, Pass
from pie_core.engine.geometry import block_words, sights
from pie_core.engine.predict import Guess
from pie_core.engine.program_info import ProgramInfo
from pie_core.engine.recurrent import RecurrentState, replayed
from pie_core.engine.runner import ROW_WORDS, RUN_WORDS, EpilogueGroup, RunnerLimits, StepBatch
from pie_core.engine.step_buffer import aligned_lane_words
from pie_core.engine.working_set import WorkingSet, pages_for

LIGHT = 64  # a lane of at most so small a part of what a step may take is not counted: read-outs bound their number


class Step:
    """Step number `number`. `passes`: those whose last tokens are in it, in lane order; `touched`: all with tokens in it;
    `guesses`: passes that are expected and not submitted yet (not counted in `n_tokens` until they are)."""

    __slots__ = (
        "_groups",
        "_lane_words",
        "_limits",
        "_work",
        "batch",
        "decode_tokens",
        "guesses",
        "n_tokens",
        "number",
        "passes",
        "prefill_room",
        "reused_tokens",
        "touched",
        "written",
    )

    def __init__(self, number: int, limits: RunnerLimits) -> None:
        self.number = number
        self.batch = StepBatch()
        self.n_tokens = 0
        self.decode_tokens = 0
        self.reused_tokens = 0
        self.prefill_room = limits.max_tokens  # rows for what comes after decode
        self.passes: list[Pass] = []
        self.touched: list[Pass] = []
        self.guesses: list[Guess] = []
        self.written: list[tuple[Pass, WorkingSet, int]] = []  # how long each set is once the step has run
        self._limits = limits
        self._groups: dict[int, tuple[EpilogueGroup, int]] = {}  # by id of the info: (group, lane words so far)
        self._lane_words = 0
        self._work = 0  # of the heavy lanes so far

    def chunk_for(self, work: Pass) -> int:
        """Tokens of `work` that this step can still take: all that remain, some of its body, or 0."""
        limits, batch = self._limits, self.batch
        room = limits.max_tokens - self.n_tokens
        room = min(room, self.prefill_room - (self.n_tokens - self.decode_tokens))
        if room <= 0:
            return 0
        if limits.state_slots:
            room -= replayed(work)
            if room <= 0 or (work.geometry.mode == "buffered" and room < work.remaining):
                return 0  # a buffer runs as a whole: behind a cut, its first part would be replayed
        tables = sum(pages_for(p.ws.length + p.n - p.done) for p in work.parts if p.done < p.n)
        if len(batch.tables) + tables > limits.table_words:
            return 0
        if work.geometry.shaped:  # of one set
            part = work.parts[0]
            room = min(room, (limits.mask_words - len(batch.masks)) // block_words(work.geometry, part.ws, part.n - part.done))
            if room <= 0:
                return 0
        left = work.to_compute
        if left <= room and self._epilogue_fits(work):
            return left
        if limits.state_slots and work.geometry.mode == "buffered":
            return 0
        return min(room, left - max(work.tail, 1)) if work.embed is None else 0

    def add(self, work: Pass, count: int) -> None:
        """Put the next `count` tokens of a ready pass into the step; with its last ones, its epilogue too."""
        freeze = work.geometry.mode == "folding"
        last = count == work.remaining
        work.remaining -= count
        work.started = True
        self.touched.append(work)
        self.n_tokens += count
        source = NONE
        if work.embed is not None:
            source = work.embed.channel.offset(work.embed.channel.head)
        read_row = len(self.batch.reads)
        gate = work.pipe.gate()
        if gate is not None:
            self.batch.gates.append(gate)
            gated = self.batch.n_tokens, len(self.batch.runs)
        for part in work.parts:
            n = part.n - part.done if last else min(count, part.n - part.done - part.tail)  # what is read lies in the last step
            first_row, first_index = len(self.batch.rows) // ROW_WORDS, part.done
            if n:
                if part.ws.state is not None:
                    first_row += len(part.ws.state.replay)
                self._rows(work, part, n, source)
                if work.geometry.tree is not None:
                    part.ws.grow(work.geometry.tree[part.done : part.done + n])
                ids = part.ids[part.done : part.done + n] if part.ids is not None else None
                part.ws.append(ids, n, plain=work.plain, freeze=freeze)
                self.written.append((work, part.ws, part.ws.length))
                part.done += n
                count -= n
                source = source + n if work.embed is not None else NONE
            part.ws.last_step = self.number
            part.ws.writing = not last
            if last:
                self.batch.reads.extend([first_row + r - first_index for r in part.reads])
        lane = self._finish(work, read_row) if last else None
        if gate is not None:
            gate.rows = range(gated[0], self.batch.n_tokens)
            gate.runs = range(gated[1] // RUN_WORDS, len(self.batch.runs) // RUN_WORDS)
            gate.lane = lane

    def fold(self, work: Pass, part: Part) -> bool:
        """Fold what the set of a part has committed, in front of `work`, which then has to wait for a later step. False: there is no
        room for it."""
        ws, batch, limits = part.ws, self.batch, self._limits
        state = ws.state
        assert state is not None  # `fold_before`
        n = ws.frozen - state.at
        if n > limits.max_tokens - self.n_tokens or len(batch.tables) + pages_for(ws.frozen) > limits.table_words:
            return False
        table = len(batch.tables)
        batch.tables.extend(ws.pages[: pages_for(ws.frozen)])
        batch.n_seqs += 1
        self._replay(state, n, table)
        batch.runs += (len(batch.rows) // ROW_WORDS, *state.extend((), 0, n), NONE)
        ws.last_step = self.number
        self.n_tokens += n
        self.touched.append(work)
        return True

    def fits(self, guess: Guess, pages: int) -> bool:
        """Whether there is room for a guess beside everything else."""
        limits, batch = self._limits, self.batch
        return batch.n_tokens < limits.max_tokens and len(batch.tables) + pages <= limits.table_words and self._epilogue_fits(guess)

    def guess(self, guess: Guess) -> None:
        """Put one token and an epilogue in that change nothing of their working set and channels."""
        batch, pos, geometry, tables = self.batch, guess.length, guess.last.geometry, self.batch.tables
        row, read_row, table = len(batch.rows) // ROW_WORDS, len(batch.reads), len(tables)
        tables += guess.pages
        if guess.page is not None:
            tables.append(guess.page)
        batch.n_seqs += 1
        slot = tables[table + pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
        batch.rows += (guess.token, NONE, pos, slot, table, geometry.window, geometry.sinks, 0)
        batch.reads += [row] * guess.reads
        self._lane(guess, guess.info, read_row)
        self.guesses.append(guess)

    def adopt(self, work: Pass) -> None:
        """Count a pass whose token and lane are in already, as a guess."""
        part = work.parts[0]
        part.ws.append(part.ids, 1, plain=work.plain, freeze=work.geometry.mode == "folding")
        self.written.append((work, part.ws, part.ws.length))
        part.ws.last_step = self.number
        part.done, work.remaining, work.started = 1, 0, True
        self.n_tokens += 1
        self.touched.append(work)
        self._cells(work)

    def _rows(self, work: Pass, part: Part, n: int, source: int) -> None:
        batch, ws = self.batch, part.ws
        pos = ws.length
        window, sinks = work.geometry.window, work.geometry.sinks
        table = len(batch.tables)
        pages = ws.pages
        batch.tables.extend(pages[: pages_for(pos + n)])
        batch.n_seqs += 1
        rows = batch.rows
        ids = part.ids
        state = ws.state
        if state is not None:
            ahead = len(state.replay)
            self.n_tokens += ahead
            self._replay(state, ahead, table)
            folding = work.geometry.mode == "folding"
            tokens = [(token, window, sinks) for token in ids[part.done : part.done + n]] if ids is not None and not folding else ()
            run = state.extend(tokens, n, ahead + n if folding else ws.frozen - state.at)
            batch.runs += (len(rows) // ROW_WORDS + n, *run, NONE)
        if work.geometry.shaped:
            for k, (depth, block) in enumerate(sights(work.geometry, ws, part.done, n)):
                slot = pages[pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
                what = (ids[part.done + k], NONE) if ids is not None else (0, source + k)
                rows += (*what, depth, slot, table, window, sinks, 1 + len(batch.masks))
                batch.masks += block
                pos += 1
        elif ids is not None:
            for token in ids[part.done : part.done + n]:
                slot = pages[pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
                rows += (token, NONE, pos, slot, table, window, sinks, 0)
                pos += 1
        else:
            for k in range(n):
                slot = pages[pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
                rows += (0, source + k, pos, slot, table, window, sinks, 0)
                pos += 1

    def _replay(self, state: RecurrentState, n: int, table: int) -> None:
        """Rows of the first `n` tokens behind the folded prefix once more: they see what they saw, and their K and V are there already."""
        for pos, (token, window, sinks) in enumerate(state.replay[:n], state.at):
            self.batch.rows += (token, NONE, pos, NONE, table, window, sinks, 0)

    def _epilogue_fits(self, work: Pass | Guess) -> bool:
        limits = self._limits
        if len(self.batch.reads) + work.reads > limits.max_reads:
            return False
        info = work.info
        if info is None:
            return True
        extra = info.work + info.first_work
        if self._work and extra > limits.step_work // LIGHT and self._work + extra > limits.step_work:
            return False  # one that is heavy always fits, light ones ride along with it
        if self.batch.results_words + self._result_words(work, info) > limits.results_words:
            return False
        return self._lane_words + self._lane_growth(info) <= limits.lane_words

    @staticmethod
    def _result_words(work: Pass | Guess, info: ProgramInfo) -> int:
        """Words of the results region that the lane of `work` takes, as `_lane` gives them out."""
        words = info.result_words
        for use in work.lane_uses:
            if use.puts and use.channel.read_back:
                words += use.channel.cell_words
        return words

    def _lane_growth(self, info: ProgramInfo) -> int:
        """Lane-table words that one more lane of `info` costs, alignment of its group included."""
        entry = self._groups.get(id(info))
        if entry is None:
            return aligned_lane_words(info.layout.words)
        return aligned_lane_words(entry[1] + info.layout.words) - aligned_lane_words(entry[1])

    def _finish(self, work: Pass, read_row: int) -> Sequence[int] | None:
        """Claim the cells of a pass whose last tokens are in, and build its lane."""
        self._cells(work)
        return self._lane(work, work.info, read_row) if work.info is not None else None

    def _cells(self, work: Pass) -> None:
        number = self.number
        for use in work.uses:
            channel = use.channel
            if use.uses_front:
                use.take_cell = channel.head
                if use.takes:
                    channel.head += 1
            if use.puts:
                use.put_cell = channel.produce(number)
        work.final = True
        self.passes.append(work)

    def _lane(self, work: Pass | Guess, info: ProgramInfo, read_row: int) -> Sequence[int]:
        words = self.batch.results_words
        work.status_word = words
        words += 1
        triples: list[tuple[int, int, int]] = []
        for use, effect in zip(work.lane_uses, info.effects, strict=True) if work.lane_uses else ():
            channel = use.channel
            get = channel.offset(use.take_cell) if effect.uses_cell else NONE
            put = copy = NONE
            if use.puts:
                put = channel.offset(use.put_cell)
                if channel.read_back:
                    copy = use.copy = words
                    words += channel.cell_words
            triples.append((get, put, copy))
        outs = []
        for _, _, size in info.outs:
            outs.append(words)
            words += size
        work.out_words = outs
        self.batch.results_words = words
        growth = self._lane_growth(info)
        lane = info.layout.pack(read_row, work.status_word, triples, outs, work.params)
        entry = self._groups.get(id(info))
        if entry is None:
            group = EpilogueGroup(info.program, [lane])
            self.batch.epilogues.append(group)
            self._groups[id(info)] = (group, info.layout.words)
        else:
            entry[0].lanes.append(lane)
            self._groups[id(info)] = (entry[0], entry[1] + info.layout.words)
        self._lane_words += growth
        if info.work + info.first_work > self._limits.step_work // LIGHT:
            self._work += info.work + info.first_work
        info.first_work = 0
        return lane
