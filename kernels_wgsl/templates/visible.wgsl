{# The positions a token sees, in order: [0, head) and [tail, pos]. `visible_at(n)` is the n-th of them. #}
struct Visible { head: u32, tail: u32, count: u32 }
fn visible(t: u32) -> Visible {
  let pos = token_word(t, 2u);
  let window = token_word(t, 5u);
  var tail = 0u;
  if (window != 0u && pos + 1u > window) { tail = pos + 1u - window; }
  let head = min(token_word(t, 6u), tail);
  return Visible(head, tail, head + pos + 1u - tail);
}
fn visible_at(v: Visible, n: u32) -> u32 { return select(n - v.head + v.tail, n, n < v.head); }
fn slot_of(pages: u32, p: u32) -> u32 { return step[pages + p / PAGE] * PAGE + p % PAGE; }
