// The API key: asked for when the server wants one, kept in this tab's session storage.

const KEY = "kilter-api-key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const note = document.getElementById("key-note");
let asking = null;  // one dialog for all requests that need the key

dialog.addEventListener("cancel", event => event.preventDefault());

/** `fetch` with the API key; where the server refuses it, asks for one and tries again.
 * milliseconds: after which an attempt is given up. */
export async function request(url, options = {}, milliseconds = null) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const signal = milliseconds === null ? options.signal : AbortSignal.timeout(milliseconds);
    const response = await fetch(url, { ...options, headers, signal });
    if (response.status !== 401) return response;
    if (key === sessionStorage.getItem(KEY)) await ask(key !== null);
  }
}

function ask(refused) {
  if (refused) note.textContent = "The server does not know that key.";
  asking ??= new Promise(resolve => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value);
      field.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
