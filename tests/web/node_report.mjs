// A reporter for Node's test runner (NODE_OPTIONS=--test-reporter=THIS): each test that ended, as a line of JSON.

export default async function* (events) {
  for await (const { type, data } of events) {
    if (type === 'test:stderr') process.stderr.write(data.message); // why a file could not be loaded
    if (type !== 'test:pass' && type !== 'test:fail') continue;
    const { file = '', name, skip = false, todo = false, details } = data;
    const error = type === 'test:fail' ? String(details.error.cause?.stack ?? details.error.cause ?? details.error) : null;
    yield `${JSON.stringify({ file, name, left_out: skip !== false || todo !== false, error })}\n`;
  }
}
