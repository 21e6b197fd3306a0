// Package release makes a release of the committed tree on a copy of the repository and uses
// it as a stranger does, with go get and go install. Its tests need every module's
// dependencies, so they are behind a build tag: run them with make release-check.
package release
