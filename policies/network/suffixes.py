"""Public suffixes: domains below which anybody can have a name, such as `co.uk` and `github.io`.

A short list, not the whole Public Suffix List, which has about 10,000 entries and changes every week:
top-level domains, second-level domains of countries by their usual words, and well-known hosts of
other people's sites.  A rule for a suffix that is missing here is accepted.
"""

# Second-level words that registries of countries use: co.uk, com.au, or.jp, gob.mx.
_WORDS = frozenset(
    """ac asso biz co com csiro ed edu firm fin gen go gob gouv gov govt gr gub gv id idf ind inf info
    int k12 ltd me med mil mod muni name ne net nhs nic nom nsn or org oz perso plc police pp presse
    pro pub res rnu sch school school tm tv web""".split()  # noqa: SIM905 - readable
)
_HOSTS = frozenset(
    """amazonaws.com appspot.com awsapprunner.com azure-api.net azurecontainer.io azureedge.net
    azurefd.net azurestaticapps.net azurewebsites.net b-cdn.net backblazeb2.com bitbucket.io
    blob.core.windows.net blogspot.com cdn77.org cloudapp.net cloudapp.azure.com cloudfront.net
    cloudfunctions.net codeberg.page core.windows.net ddns.net deno.dev digitaloceanspaces.com
    duckdns.org dyndns.org edgekey.net edgesuite.net fastly.net fastlylb.net firebaseapp.com fly.dev
    github.io githubpreview.dev githubusercontent.com gitlab.io glitch.me hf.space herokuapp.com
    hopto.org loca.lt localhost.run lovable.app netlify.app ngrok.app ngrok.dev ngrok-free.app
    ngrok-free.dev ngrok.io nip.io no-ip.org notion.site onrender.com oraclecloud.com pages.dev
    pipedream.net plesk.page r2.dev railway.app readthedocs.io repl.co replit.app replit.dev
    requestcatcher.com run.app s3.amazonaws.com serveo.net sslip.io stackblitz.io storage.googleapis.com
    supabase.co surge.sh trafficmanager.net translate.goog trycloudflare.com ts.net vercel.app
    web.app web.core.windows.net webflow.io wixsite.com workers.dev wordpress.com xip.io
    zapto.org""".split()  # noqa: SIM905 - readable
)
_MOST_LABELS = 2
_COUNTRY_CODE = 2  # letters


def is_public_suffix(name: str) -> bool:
    """Tell whether a canonical name is a public suffix of this list."""
    labels = name.split(".")
    if len(labels) == 1 or name in _HOSTS:
        return True
    # An address in a name, or a region, may come between: *.s3.eu-west-1.amazonaws.com.
    if name.endswith(".amazonaws.com"):
        return True
    if len(labels) > _MOST_LABELS:
        return False
    return len(labels[-1]) == _COUNTRY_CODE and labels[0] in _WORDS
