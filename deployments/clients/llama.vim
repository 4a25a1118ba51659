" .vimrc or init.vim, with the plugin ggml-org/llama.vim
"
" The plugin has no setting for a task or an SLA; put them into the URL. llama.vscode: set `llama-vscode.endpoint` to
" http://127.0.0.1:8000/t/completion
let g:llama_config = {
    \ 'endpoint': 'http://127.0.0.1:8000/t/completion/interactive/infill',
    \ 'api_key': '',
    \ 'n_predict': 64,
    \ 't_max_prompt_ms': 500,
    \ 't_max_predict_ms': 1000,
    \ }
