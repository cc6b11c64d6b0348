// Questions to the server. An answer comes as one JSON object per line; a refusal is an error with its kind.

export class Refusal extends Error {
  constructor({error, message}) {
    super(message);
    this.kind = error;
  }
}

// The facts of a response. A question that has no answer is answered with its reason.
async function read(response) {
  let facts = {error: "HTTPError", message: `The studio answered ${response.status}. Is it still running?`};
  try { facts = JSON.parse((await response.text()).split("\n")[0]); } catch { /* no JSON: not from the studio */ }
  if (facts.error) throw new Refusal(facts);
  return facts;
}

export async function get(path) {
  return read(await fetch(path));
}

function post(path, question, signal) {
  return fetch(path, {method: "POST", body: JSON.stringify(question), headers: {"Content-Type": "application/json"}, signal});
}

// Yields every line of an answer as soon as it is here. Aborting the signal ends the work on the server too.
export async function* ask(path, question, signal) {
  const response = await post(path, question, signal);
  if (!response.ok) await read(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const facts = JSON.parse(line);
      if (facts.error) throw new Refusal(facts);
      yield facts;
    }
  }
}

export async function askOnce(path, question, signal) {
  for await (const facts of ask(path, question, signal)) return facts;
  throw new DOMException("superseded", "AbortError");
}

export async function download(path, question) {
  const response = await post(path, question);
  if (response.headers.get("Content-Type") !== "application/octet-stream") await read(response);
  return response.blob();
}
