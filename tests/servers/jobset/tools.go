//go:build tools

// Package tools pins the servers that the tests start; build.sh builds them by their import path.
package tools

import _ "sigs.k8s.io/jobset"
