//go:build tools

// Package tools pins the client that fills a store; build.sh builds it by its import path.
package tools

import _ "github.com/minio/mc"
