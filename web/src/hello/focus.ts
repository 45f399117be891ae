// The focus of the keyboard never falls off the page: who had it goes on somewhere sensible when a control is hidden or switched off.

/** Do `change`; if it takes the focused control away, the first of `next` that can be used gets the focus. */
export function keepingFocus(change: () => void, ...next: readonly HTMLElement[]): void {
  const before = document.activeElement;
  change();
  if (!(before instanceof HTMLElement) || before === document.body || usable(before)) return;
  next.find(usable)?.focus({ preventScroll: true });
}

function usable(element: HTMLElement): boolean {
  return element.isConnected && !element.matches(":disabled") && element.getClientRects().length > 0;
}
