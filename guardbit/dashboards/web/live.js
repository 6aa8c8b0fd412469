// What a live page and the list of runs share: both ask the server again and again, and say so
// where it is silent. `update` is the page's own.

async function askServer(question) {
  const answer = await fetch(question, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function showStatus(kind, text) {
  $("status").textContent = text;
  $("status").className = kind;
}

// A page that nobody looks at asks once.
let isUpdating = false;
let hasAsked = false;

async function tick() {
  if (isUpdating || (document.hidden && hasAsked)) return;
  isUpdating = true;
  try {
    await update();
    hasAsked = true;
  } catch (error) {
    showStatus("lost", `no answer from guardbit live: ${error.message}; this is the last state`);
  } finally {
    isUpdating = false;
  }
}

function askEvery(milliseconds) {
  tick();
  setInterval(tick, milliseconds);
}
