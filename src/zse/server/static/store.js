/* What the browser keeps. The API key lives in the tab's storage and nowhere else, no cookie holds it. With a key, chats and settings stay
   in the tab too, so that the next person at this browser does not find them; without one they stay in the browser. */

const KEY = "zse.key";
const PREFIX = "zse.";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Forgets the key and all that was kept with it. */
export function logOut() {
  sessionStorage.clear();
}

const place = () => (apiKey() ? sessionStorage : localStorage);

/** The value that keep() was given under that name, or `otherwise`. */
export function kept(name, otherwise) {
  try {
    return JSON.parse(place().getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Keeps a value; whether there was room for it. */
export function keep(name, value) {
  try {
    place().setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Forgets what keep() was given; the key stays. */
export function forgetAll() {
  for (const name of Object.keys(place())) if (name.startsWith(PREFIX) && name !== KEY) place().removeItem(name);
}

/** An identifier nobody else has. (crypto.randomUUID() is missing on pages that came over plain HTTP from another machine.) */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
