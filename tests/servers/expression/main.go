// Command expression says whether Argo Workflows would try a node again.
//
// It reads a line of JSON for each question, {"expression": ..., "lastRetry": {...}}, and evaluates
// the expression as Argo does (argoproj/argo-workflows, util/expr/argoexpr/eval.go, with the scope
// that workflow/controller/operator.go builds in buildRetryStrategyLocalScope).
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/expr-lang/expr"
)

func main() {
	questions := json.NewDecoder(os.Stdin)
	for {
		scope := map[string]any{}
		if err := questions.Decode(&scope); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		program, err := expr.Compile(fmt.Sprint(scope["expression"]), expr.Env(scope))
		if err != nil {
			log.Fatal(err)
		}
		result, err := expr.Run(program, scope)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(result.(bool))
	}
}
