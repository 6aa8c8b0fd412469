"use strict";
// What the live page and the list of runs share: both ask the server again and again, and say so where it is silent.

const SILENT_AFTER = 120;

async function ask(question) {
  const answer = await fetch(question, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function ago(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// A page that nobody looks at asks once.
let updating = false, asked = false;
async function tick() {
  if (updating || document.hidden && asked) return;
  updating = true;
  try {
    await update();
    asked = true;
  } catch (error) {
    $("status").textContent = `no answer from guardbit live: ${error.message}; this is the last state`;
    $("status").className = "lost";
  } finally {
    updating = false;
  }
}
