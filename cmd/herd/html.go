package main

import (
	"bytes"
	"encoding/json"
	"html/template"
	"io"
	"strings"
)

// writeHTML writes a page that needs no other file: the explanation, pictures, tables, and the
// scenarios, for readers who want to run them again.
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
			text = []byte(err.Error()) // it has no form in JSON
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

// picture returns an SVG for use within a page.
func picture(s seen) (template.HTML, error) {
	var b bytes.Buffer
	if err := writeSVG(&b, s); err != nil {
		return "", err
	}
	text := b.String()
	return template.HTML(text[max(0, strings.Index(text, "<svg")):]), nil // our own drawing, its texts escaped
}

// pageStyle is the style of all pages.
const pageStyle = `:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --box: #f4f4f4 }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #16181b; --line: #3a3d42; --box: #22252a } }
body { font: 15px/1.5 'Liberation Sans', Arial, Helvetica, sans-serif; color: var(--text); background: var(--page);
  max-width: 64em; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
.picture { overflow-x: auto; background: #fff; border-radius: 4px } /* pictures are drawn for white, and no smaller than can be read */
svg { display: block; width: 46em; max-width: 100%; min-width: 34em; height: auto }
.table { overflow-x: auto; margin: 1em 0 }
table { border-collapse: collapse; font-size: 12px }
th, td { padding: .2em .55em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
pre { font-size: 12px; background: var(--box); padding: 1em; overflow-x: auto; overflow-wrap: normal }
`

var pageTemplate = template.Must(template.New("page").Parse(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{.Title}}</title>
<style>
` + pageStyle + `</style>
</head>
<body>
<h1>{{.Title}}</h1>
{{with .See}}<p>{{.}}</p>{{end}}
{{if gt .Runs 1}}<p>Numbers are averages over {{.Runs}} seeds; pictures show the first.</p>{{end}}
{{template "picture" .Picture}}
{{range .Tables}}{{template "table" .}}{{end}}
{{range .Sections}}
<h2>{{.Name}}{{with .Title}}: {{.}}{{end}}</h2>
{{template "picture" .Picture}}
{{range .Tables}}{{template "table" .}}{{end}}
<details><summary>The scenario, for <code>herd -scenario</code></summary><pre>{{.Scenario}}</pre></details>
{{end}}
</body>
</html>
{{define "picture"}}{{with .}}<div class="picture">{{.}}</div>{{end}}{{end}}
{{define "table"}}{{if .}}<div class="table"><table>
{{range $i, $line := .}}<tr>{{range $line}}{{if eq $i 0}}<th>{{.}}</th>{{else}}<td>{{.}}</td>{{end}}{{end}}</tr>
{{end}}</table></div>{{end}}{{end}}`))
