/**
 * The data of each server-sent event of a body, as it comes. Chunks may end anywhere, inside a character too.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return; // an event without its blank line was cut off
      }
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const line of lines.map((line) => line.replace(/\r$/, ""))) {
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    await reader.cancel();
  }
}
