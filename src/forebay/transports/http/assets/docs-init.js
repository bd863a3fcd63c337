// SPDX-License-Identifier: Apache-2.0
// Starts the API page. In a file of its own, so that the page works under a policy that forbids inline scripts.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Follows the dashboard's colours, which follow those of the browser unless others were chosen there. */
function paint() {
  let chosen = null;
  try {
    chosen = localStorage.getItem("forebay-theme");
  } catch {
    // some browsers are told to remember nothing
  }
  document.documentElement.classList.toggle("dark-mode", chosen === "dark" || (chosen !== "light" && dark.matches));
}

paint();
dark.addEventListener("change", paint);

window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // Without this the page would ask a validator on the internet what it thinks of the document.
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
  onComplete: () => {
    const title = window.ui.specSelectors.info().get("title");
    if (title) document.title = title;
  },
});
