// Package browser looks at the debug page in a real headless Chromium. Its tests need one, so they are
// behind a build tag: run them with make browser, which installs it.
package browser
