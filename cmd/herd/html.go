package main

import (
	"bytes"
	"encoding/json"
	"html/template"
	"io"
	"strings"
)

// writeHTML writes one page that needs nothing else: what to see, a picture, the tables,
// and for who wants to run it again, the scenarios.
func writeHTML(w io.Writer, s seen) error {
	p := page{Title: s.Title, See: s.See, Runs: s.runs}
	if p.Title == "" {
		p.Title = s.Name
	}
	for _, one := range s.scenarios {
		part := s
		part.scenarios = []seenScenario{one}
		section := section{Name: one.Name, Title: capital(one.Title)}
		if s.Vary == "" {
			var err error
			if section.Picture, err = picture(part); err != nil {
				return err
			}
			section.Tables = append(section.Tables, comparison(one), groupTable(one))
		}
		text, err := json.MarshalIndent(one.Scenario, "", "  ")
		if err != nil {
			text = []byte(err.Error()) // of Go alone
		}
		section.Scenario = string(text)
		p.Sections = append(p.Sections, section)
	}
	if s.Vary != "" {
		var err error
		if p.Picture, err = picture(s); err != nil {
			return err
		}
		for _, w := range sweeps(&s) {
			for _, t := range w.tables(all) {
				p.Tables = append(p.Tables, t.cells)
			}
		}
	}
	return pageTemplate.Execute(w, p)
}

type page struct {
	Title, See string
	Runs       int
	Picture    template.HTML
	Tables     [][][]string
	Sections   []section
}

type section struct {
	Name, Title string
	Picture     template.HTML
	Tables      [][][]string
	Scenario    string
}

// picture is an SVG to stand within a page.
func picture(s seen) (template.HTML, error) {
	var b bytes.Buffer
	if err := writeSVG(&b, s); err != nil {
		return "", err
	}
	text := b.String()
	return template.HTML(text[max(0, strings.Index(text, "<svg")):]), nil // drawn by ourselves, texts escaped
}

var pageTemplate = template.Must(template.New("page").Parse(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Title}}</title>
<style>
body { font: 15px/1.5 'Liberation Sans', Arial, Helvetica, sans-serif; color: #222; max-width: 64em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
svg { width: 46em; max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: 12px; margin: 1em 0; display: block; overflow-x: auto }
th, td { padding: .2em .55em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
pre { font-size: 12px; background: #f4f4f4; padding: 1em; overflow-x: auto }
</style>
</head>
<body>
<h1>{{.Title}}</h1>
{{with .See}}<p>{{.}}</p>{{end}}
{{if gt .Runs 1}}<p>Numbers are averages over {{.Runs}} seeds; pictures show the first.</p>{{end}}
{{.Picture}}
{{range .Tables}}{{template "table" .}}{{end}}
{{range .Sections}}
<h2>{{.Name}}{{with .Title}}: {{.}}{{end}}</h2>
{{.Picture}}
{{range .Tables}}{{template "table" .}}{{end}}
<details><summary>The scenario, for <code>herd -scenario</code></summary><pre>{{.Scenario}}</pre></details>
{{end}}
</body>
</html>
{{define "table"}}{{if .}}<table>
{{range $i, $line := .}}<tr>{{range $line}}{{if eq $i 0}}<th>{{.}}</th>{{else}}<td>{{.}}</td>{{end}}{{end}}</tr>
{{end}}</table>{{end}}{{end}}`))
