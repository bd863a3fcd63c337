// SPDX-License-Identifier: Apache-2.0
// Starts the API page. In a file of its own, so that the page works under a policy that forbids inline scripts.
"use strict";

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
