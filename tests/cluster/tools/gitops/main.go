// Judges objects as Argo CD and Flux do: by the health check in Lua that is named, and by kstatus.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

type verdict struct {
	Argo    argo   `json:"argo"`
	Kstatus string `json:"kstatus"`
}

type argo struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return errors.New("usage: gitops-health CHECK.lua < a list of objects in JSON")
	}
	script, err := os.ReadFile(os.Args[1])
	if err != nil {
		return err
	}
	var objects []map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		return err
	}
	verdicts := make([]verdict, len(objects))
	for i, object := range objects {
		health, err := judge(string(script), object)
		if err != nil {
			return fmt.Errorf("object %d: %w", i, err)
		}
		result, err := status.Compute(&unstructured.Unstructured{Object: whole(object).(map[string]any)})
		if err != nil {
			return fmt.Errorf("object %d: %w", i, err)
		}
		verdicts[i] = verdict{health, result.Status.String()}
	}
	return json.NewEncoder(os.Stdout).Encode(verdicts)
}

// judge runs a check with the libraries that Argo CD gives one by default, which are few.
func judge(script string, object map[string]any) (argo, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable,
	} {
		if err := state.CallByParam(lua.P{Fn: state.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			return argo{}, err
		}
	}
	state.SetGlobal("obj", value(state, object))
	if err := state.DoString(script); err != nil {
		return argo{}, err
	}
	answer, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return argo{}, errors.New("the check returned no table")
	}
	return argo{answer.RawGetString("status").String(), lua.LVAsString(answer.RawGetString("message"))}, nil
}

// value is a JSON value as Lua sees it.
func value(state *lua.LState, from any) lua.LValue {
	switch v := from.(type) {
	case bool:
		return lua.LBool(v)
	case float64:
		return lua.LNumber(v)
	case string:
		return lua.LString(v)
	case []any:
		table := state.CreateTable(len(v), 0)
		for _, each := range v {
			table.Append(value(state, each))
		}
		return table
	case map[string]any:
		table := state.CreateTable(0, len(v))
		for key, each := range v {
			table.RawSetString(key, value(state, each))
		}
		return table
	default:
		return lua.LNil
	}
}

// whole makes integers of whole numbers, as clients of Kubernetes have them.
func whole(from any) any {
	switch v := from.(type) {
	case float64:
		if v == float64(int64(v)) {
			return int64(v)
		}
	case []any:
		for i := range v {
			v[i] = whole(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = whole(v[key])
		}
	}
	return from
}
